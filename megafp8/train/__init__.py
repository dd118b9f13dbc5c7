"""Train a GPT: assembled in `build`, driven in `loop`, one step in `step`."""
