"""How values of slices become the value of the whole batch.

rehearsal    values of slices, and of one device --Search--> a Rule for each path
real step    values of slices --MergeRules: a Merger, by rule; by type, where there is none--> value of the batch
"""
