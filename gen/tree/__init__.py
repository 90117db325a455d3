"""What expressions are made of: nodes, how they are walked, typed, simplified and printed."""
