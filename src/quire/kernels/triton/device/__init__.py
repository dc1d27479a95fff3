"""Functions compiled by Triton. Only `quire.kernels.triton` imports these modules, on first use.

All kernels follow these rules:

* A number is converted to `OPERAND` right after its load: Triton 3.9's interpreter computes wrong
  numbers on bfloat16. `OPERAND` is the type of the operands of `tl.dot`: float32 in the
  interpreter, the type of the queries on a GPU. All other arithmetic is in float32.
* Slots that no query sees are masked at their load, because free slots may hold NaN.
* Exponentials have base 2: logits and their log-sum-exp are multiplied by log2(e).
* Argument names in capitals are compile-time constants.
"""
