"""Code that several processes use: `errors.py` has every exception; the folders have the rest."""
