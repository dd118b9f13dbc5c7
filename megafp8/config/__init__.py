"""From Hydra's overrides and YAML, in NeMo's names, to the project's own specs. No torch here.

The way of a setting: `schema` (what keys there are) → `load` (compose and check types) →
`validate` (what fits together) → `resolve` (a `RunSpec`). `app` is the command line around it,
`identity` tells which runs may continue each other, `document` prints the page of all keys.
"""
