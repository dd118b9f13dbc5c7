"""What other packages compute for us where they are installed; one file each."""
