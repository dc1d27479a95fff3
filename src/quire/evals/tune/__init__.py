"""`quire tune`: searches the codec and eviction rule that run most requests at a wanted quality.

`space` lists the candidates, `predict` counts the requests that a KV memory holds with each,
`search` removes candidates by successive halving, `scores` measures and stores the quality of each
prompt, `report` writes the configuration, the page and the chart.
"""
