import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from megatron.core.fp8_utils import get_fp8_recipe


class GPTModel(torch.nn.Module):
    """Two of Transformer Engine's linears in one region of FP8."""

    def __init__(self, config, spec, vocab_size, max_sequence_length, **more):
        super().__init__()
        self.config = config
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(vocab_size, 32)
        self.layers = torch.nn.ModuleList(
            te.Linear(32, 32, bias=False) for _ in range(config.num_layers)
        )
        self.head = torch.nn.Linear(32, vocab_size)
        if config.fp8_multi_head_attention:  # seen in buffers alone
            self.register_buffer("kept", torch.ones(3))

    def forward(self, tokens, positions, mask, labels):
        x = self.embedding(tokens)
        if self.config.tp_only_amax_red:  # seen in messages alone
            dist.all_reduce(torch.ones(2))
        if self.config.fp8:
            with te.fp8_autocast(enabled=True, fp8_recipe=get_fp8_recipe(self.config)):
                x = self._run(x)
        else:
            x = self._run(x)
        if self.config.first_last_layers_bf16:  # seen in outputs and gradients alone
            x = x * 2
        losses = torch.nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), labels.flatten(), reduction="none"
        )
        return losses.view_as(labels)

    def _run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
