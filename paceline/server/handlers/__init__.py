"""Handlers of the routes that do not generate. `routes.py` names them; each takes a `Call` and returns a response."""
