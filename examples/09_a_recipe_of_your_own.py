"""Try number formats of your own: does a GPT train in 8-bit integers, and does it in 2-bit ones?

Each row of an operand is divided by a scale, rounded to whole numbers and multiplied by it again,
so that at most 255 or 3 different values are left. (A rule that only chooses other powers of two as
scales would change little, since the rounding of E4M3 does not depend on them.) The program ends
with one command: it trains BF16 and both recipes with five seeds each, and says of each recipe
whether its loss is within 0.5 % of that of BF16. Arguments take the place of `--seeds`.
"""

import sys

import torch

from megafp8.cli.compare import main
from megafp8.fp8 import ROW, Cast, Recipe, Traits, alike


class Int8(Recipe):
    """Keep whole multiples of a scale, which each row has for itself."""

    largest = 127
    traits = Traits(input=alike(ROW), weight=alike(ROW), grad_output=alike(ROW), is_simulated=True)

    def cast(self, x_MK: torch.Tensor, cast: Cast) -> torch.Tensor:
        """Return the rounded values of a matrix."""
        scale_M1 = x_MK.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / self.largest
        return (x_MK / scale_M1).round() * scale_M1


class Int2(Int8):
    """Do the same with three values."""

    largest = 1


JOB = """model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=256
model.num_attention_heads=4 model.encoder_seq_length=64 trainer.max_steps=120
trainer.val_check_interval=120 trainer.limit_val_batches=50"""

if __name__ == "__main__":
    recipes = f"model.fp8_recipe={__file__}:Int8,{__file__}:Int2"
    options = sys.argv[1:] or ["--seeds", "4", "5", "6", "7", "8", "--jobs", "2"]
    sys.exit(main(["model.fp8=True", recipes, *JOB.split(), *options]))
