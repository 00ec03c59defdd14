"""Our measuring scripts, beside their results. Never installed."""
