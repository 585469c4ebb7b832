"""What measurements are set beside: a plain baseline, the floor, published rows."""
