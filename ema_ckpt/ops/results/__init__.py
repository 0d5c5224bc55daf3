"""Results of the verbs: frozen dataclasses, a module a verb; their fields are the JSON."""
