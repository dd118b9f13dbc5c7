"""The specification: a slow, obvious Python model of each rule that `megafp8` must obey.

Nothing here imports `megafp8` or torch, so an error cannot hide in both. Production code is
compared with it bit for bit: payloads, scales, histories. Read `formats`, then `delayed`, then
`linear`; `test_spec.py` holds the specification itself to facts from outside.
"""
