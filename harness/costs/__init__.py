"""How long runs will take, estimated from the times of earlier runs."""
