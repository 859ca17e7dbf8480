"""How values of slices become the value of the whole batch.

rehearsal    values of slices, and of one device --RuleSearch--> Rule for each path
real step    values of slices --StageRules: Merger, by rule; by_type, where there is none--> value of the batch
"""
