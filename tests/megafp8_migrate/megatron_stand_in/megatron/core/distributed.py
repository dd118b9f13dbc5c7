import torch


def finalize_model_grads(models):
    pass


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, config, ddp_config, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self):
        pass
