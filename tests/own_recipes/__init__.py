"""Recipes as users write them, each in one file outside of the package."""
