"""What several folders of tests share: one module per idea."""
