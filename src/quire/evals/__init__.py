"""Quality: tasks whose answer stands in the prompt, and the gate every judging model must pass.

`tasks` makes prompts from a seed, `haystack` is the book text between the records, `recall` asks
them under several eviction rules and counts exact answers by depth, `gate` says whether a model
may judge a rule at all. Nothing here loads torch: the caller brings a function that answers.
"""
