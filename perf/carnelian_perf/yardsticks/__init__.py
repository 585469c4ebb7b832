"""What measurements are set beside: a plain baseline, the floor that nothing can beat, published rows."""
