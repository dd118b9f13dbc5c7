"""Find out what the machine can compute itself, and run the products that it cannot.

No other package of megafp8 is imported here.
"""
