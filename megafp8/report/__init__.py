"""Write what runs left behind as one offline HTML page: curves, FP8 health, settings, events."""
