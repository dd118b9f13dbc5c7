"""Translate the files of other frameworks for megafp8, and compare both readings of them."""
