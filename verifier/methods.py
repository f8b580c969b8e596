"""The verification methods: name -> Method. A new one is a plan (or a file) and one line in this
dict.

Tests, the evaluation and the benchmarks loop over METHODS and pick a new entry up by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

from ..files import nearest
from . import plans
from .compose import conditional, top_down
from .fly import ENTROPY, WINDOW, fly
from .law import DraftTree, Law, unit, validate
from .multipath import greedy_multipath_block

MOST_AHEAD = 1000  # tokens that fly may look ahead
DRAFTINGS = ("chain", "paths", "with_replacement", "without_replacement", "greedy")


@dataclass(frozen=True)
class Method:
    """A law and the way its tree must be drawn.

    law:       what is given: any function from a tree to its law. What is kept: the same, after
               `validate`.
    drafting:  the drafting law it is used with, one of DRAFTINGS.
    exact_for: all drafting laws it is exact for; a delayed tree counts as the law below its trunk.
    on_chain:  "token" or "block": the one of these two that the method is on a chain; "" if it is
               neither.
    kernel:    from logits to the verdict on a GPU, as `kernels.verify` without its first argument;
               None where a method has none.
    ahead:     0 for a method that is exact for the rows it is given. A lossy one looks at so many
               drafted tokens behind a mismatch. It is for chains at temperature 0 alone, and its
               target rows are what the target believes.
    unchecked: the law without validation, which waits for no device; for loops whose rows are known
        to be sound.
    """

    law: Callable[[DraftTree], Law]
    drafting: str
    exact_for: tuple[str, ...] = ()
    on_chain: str = ""
    kernel: Callable | None = None
    ahead: int = 0
    unchecked: Callable[[DraftTree], Law] = field(init=False, repr=False)

    def __post_init__(self):
        given = self.law
        exact_for = self.exact_for or (self.drafting,)
        for drafting in (self.drafting, *exact_for):
            _known("drafting law", drafting, DRAFTINGS)
        object.__setattr__(self, "exact_for", exact_for)
        object.__setattr__(self, "unchecked", lambda tree: _in_single_precision(given, tree))
        object.__setattr__(self, "law", lambda tree: self.unchecked(validate(tree)))

    def require(self, drafting: str) -> None:
        """ValueError unless this method is exact for trees drawn by `drafting`."""
        _known("drafting law", drafting, DRAFTINGS)
        if drafting not in self.exact_for:
            raise ValueError(
                f"`drafting` must be one this method is exact for ({', '.join(self.exact_for)}),"
                f" got {drafting}; another pair would change the law of the text"
            )


def method(name: str) -> Method:
    """The method called `name`, or the one that `package.module:NAME` points to."""
    if is_lossy(name):
        return _fly(name)
    if ":" in name:
        return _imported(name)
    return METHODS[_known("method", name.replace("-", "_"), METHODS)]


def _imported(name: str) -> Method:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"method {name!r} must be package.module:NAME, got an import that fails: {error}"
        ) from None
    if not isinstance(found, Method):
        raise ValueError(
            f"method {name!r} must name a verifier.Method, got {type(found).__name__}; wrap it in"
            " Method"
        )
    return found


def is_lossy(name: str) -> bool:
    """Whether the method of this name accepts more than its rows allow."""
    return name.partition(":")[0] == "fly"


def _fly(name: str) -> Method:
    """fly[:WINDOW[,ENTROPY]]"""
    given = name.split(":")[1:]
    parts = given[0].split(",") if len(given) == 1 else given
    try:
        window = int(parts[0]) if parts else WINDOW
        entropy = float(parts[1]) if len(parts) > 1 else ENTROPY
    except ValueError:
        window = entropy = -1
    if len(parts) > 2 or len(given) > 1 or not (1 <= window <= MOST_AHEAD and 0 <= entropy < 2):
        raise ValueError(
            f"method {name!r} must be fly, fly:WINDOW or fly:WINDOW,ENTROPY with a whole number of"
            f" tokens from 1 to {MOST_AHEAD} and nats from 0 to below 2, such as fly:6,0.3"
        )
    return Method(fly(window, entropy), "chain", ahead=window)


def _known(what: str, name: str, names) -> str:
    if name in names:
        return name
    raise ValueError(f"unknown {what} {name!r}{nearest(name, names)}")


def _in_single_precision(law: Callable[[DraftTree], Law], tree: DraftTree) -> Law:
    """Half-precision rows are computed in float32, scaled to sum to 1, and the law is returned in
    their dtype.
    """
    dtype = tree.target.dtype
    if dtype.itemsize > 2:
        return law(tree)
    found = law(replace(tree, draft=unit(tree.draft.float()), target=unit(tree.target.float())))
    return Law(stop=found.stop.to(dtype), next=found.next.to(dtype))


def _kernel(name: str) -> Callable:
    def kernel(*arguments, **options):
        from .kernels import verify  # registers an operation with torch: only where it is used

        return verify(name, *arguments, **options)

    return kernel


METHODS: dict[str, Method] = {
    "token": Method(top_down(plans.rejection), "chain", on_chain="token", kernel=_kernel("token")),
    "block": Method(
        conditional(plans.rejection, ahead=plans.chain_masses),
        "chain",
        on_chain="block",
        kernel=_kernel("block"),
    ),
    "gbv": Method(greedy_multipath_block, "paths", ("paths", "chain"), on_chain="block"),
    "specinfer": Method(
        top_down(plans.with_replacement, merge=True),
        "paths",
        ("paths", "with_replacement", "chain"),
        on_chain="token",
    ),
    "kseq": Method(
        top_down(plans.k_seq, merge=True),
        "paths",
        ("paths", "with_replacement", "chain"),
        on_chain="token",
    ),
    "rrsw": Method(
        top_down(plans.without_replacement, merge=True),
        "without_replacement",
        ("without_replacement", "paths", "chain"),
        on_chain="token",
        kernel=_kernel("rrsw"),
    ),
    "traversal": Method(
        conditional(plans.without_replacement, merge=True),
        "without_replacement",
        ("without_replacement", "paths", "chain"),
        on_chain="block",
        kernel=_kernel("traversal"),
    ),
    "greedy_tree": Method(
        top_down(plans.greedy_transport),
        "greedy",
        ("greedy", "chain"),
        on_chain="token",
        kernel=_kernel("greedy_tree"),
    ),
    "univer": Method(
        conditional(plans.greedy_transport),
        "greedy",
        ("greedy", "chain"),
        on_chain="block",
        kernel=_kernel("univer"),
    ),
}
