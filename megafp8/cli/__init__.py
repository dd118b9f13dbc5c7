"""The commands of megafp8, and the parts of the command line that they have in common."""
