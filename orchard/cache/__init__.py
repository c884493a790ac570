"""Keys and values, and weights, that live outside the modules that use them."""
