"""Turn Hydra's overrides and YAML files, in NeMo's names, into the project's specs, without torch.

`schema` defines the keys. `layers` finds the files, and `load` merges them with the overrides and
checks every value; the rules between keys are in `checks` and `together`. `resolve` makes the
`RunSpec` that the rest of the program reads. `resume` decides which runs may continue each other.
"""
