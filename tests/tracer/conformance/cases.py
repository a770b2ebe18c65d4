"""Every case there is, in the order of the table."""

import warnings

from tests.tracer.conformance.case import CASES, Case

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what clients say of one another's versions at import
    from tests.tracer.conformance.clients import (  # each declares its cases
        anthropic_sdk,
        bare_httpx,
        langchain_chat,
        langgraph_graphs,
        litellm_sdk,
        openai_sdk,
    )

CLIENTS = (openai_sdk, anthropic_sdk, litellm_sdk, langchain_chat, langgraph_graphs, bare_httpx)


def _place(case: Case) -> tuple[int, int, int]:
    names = [module.__name__ for module in CLIENTS]
    module, line = case.function.__module__, case.function.__code__.co_firstlineno
    return names.index(module), line, -CASES.index(case)  # decorators are declared from below


ALL = sorted(CASES, key=_place)
