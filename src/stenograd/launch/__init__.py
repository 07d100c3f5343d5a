"""How ranks are started, find one another, and notice a lost one."""
