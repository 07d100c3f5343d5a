"""How requests reach the other ranks: drivers, pipelines, simulation, the ledger of bytes."""
