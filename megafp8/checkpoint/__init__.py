"""Write and read checkpoints: files, hashes, commits and resharding, without communication.

A checkpoint is a directory `step_…` with safetensors files, a manifest (`manifest`) of the pieces
of tensors in them, and the manifest's hash. `store` writes, commits and deletes checkpoints,
`reader` loads one into any layout, and `verification` checks every byte. `huggingface` converts
models from and to the form of the library transformers. Ranks exchange data in `train`, not here.
"""
