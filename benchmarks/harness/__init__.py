"""What the benchmarks share: processes that form ranks, bars with their table, records of results, resident memory."""
