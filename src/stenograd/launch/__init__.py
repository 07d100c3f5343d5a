"""How ranks find one another, and how a lost one is noticed."""
