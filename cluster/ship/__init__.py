"""Models and environments: fetched once, brought to every host that needs them."""
