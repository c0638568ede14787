"""Facts + request + matrix -> a Plan, or an explanation. Pure: no network, clock, environment or subprocess here."""
