"""`outrider.hf.generate`, for `model.generate(…, custom_generate=…)` of transformers (docs/library.md).

It is imported when it is first used: `import outrider` imports neither torch nor transformers. Imports the edge's
client and its draft in PyTorch.
"""

from outrider.hf.generation import generate

__all__ = ["generate"]
