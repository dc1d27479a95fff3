"""Quality evaluation: tasks with the answer in the prompt, and a sanity check of models.

`tasks` generates prompts from a seed. `gate` returns prompts of a task at one length,
counts exact answers by depth and checks whether a model can evaluate an eviction policy. This
package does not import torch: the caller passes a function that generates outputs.
"""
