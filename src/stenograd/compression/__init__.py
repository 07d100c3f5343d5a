"""How codes are made and how they travel: the contract, error feedback, and collectives for codes."""
