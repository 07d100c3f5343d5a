"""What one step exchanges: buckets and their states, the engine, exchanges between simulated ranks."""
