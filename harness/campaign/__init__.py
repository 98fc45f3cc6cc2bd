"""A campaign: many runs in one order, in pieces, over several machines and sittings."""
