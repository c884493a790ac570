"""Keys and values (and later experts) that live outside the modules that use them."""
