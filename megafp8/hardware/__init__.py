"""What the machine can do by itself, and how products run where it cannot. Below every room."""
