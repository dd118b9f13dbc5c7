"""Predict what a run costs from its specs, without torch or a device, in milliseconds."""
