"""`quire eval run`: tasks behind one interface, their scores with intervals, verdicts about rules.

`base` has the interface. `registry` makes prompts from `quire.evals.tasks`, and lists all tasks and
the suites. `runner` runs cells (a task at one length, with one configuration), which
`cells` stores. `sanity` checks that the model may judge a rule.
"""
