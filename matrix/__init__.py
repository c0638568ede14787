"""The facts: what each release needs, what runs where, what is known to break. Every row has a source."""
