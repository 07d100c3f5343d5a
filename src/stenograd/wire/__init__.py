"""How requests reach the other ranks: requests, drivers, gloo, pipelines, the ledger of bytes."""
