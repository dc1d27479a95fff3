r"""Rewrites the regular expressions, JSON schemas and Lark grammars of clients for llguidance.

    regex          meaning of Python's `re.fullmatch`, but `\d`, `\w` and `\s` are ASCII
    pattern        meaning of `re.search`, and of ECMA-262 too: the output matches in both dialects
    JSON Schema    keywords of drafts 4 to 2020-12 with the form that the library reads
    Lark grammar   the same for its `/regex/` and its `%json {...}`

llguidance reads some syntax differently (`[[:alpha:]]`, `\w`, anchors in alternatives), and passes
over values that are not of the form that it knows (`"exclusiveMinimum": true`). Everything is
either rewritten to a form that has one meaning in all dialects, or refused with the reason.
"""

import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # the tree gives Python's own reading
from typing import Any
from urllib.parse import unquote

MAX_REGEX_LENGTH = 50_000
"""Limit of the longest text of a regex, with an open repetition counted once more than its
minimum: a mask takes up to 20 ms at this length."""

MAX_REGEX_TEXT = 1 << 22
"""Limit of the characters of all rewritten classes of a structure; `\\W` of Unicode has 13,000."""

MAX_TERMINAL_DEPTH = 64
"""Limit of the terminals of a Lark grammar that use each other in a row."""

MAX_INTERSECTED = 16
"""Limit of the expressions that one text must match: their product is exponential in size."""

MAX_PATTERN_PROPERTIES = 200
"""Limit of one object: each pair of patterns is compared."""

MAX_MULTIPLE_OF = 100_000
"""Limit of `multipleOf`, without its decimal point: the states of its automaton."""

MAX_OPTIONAL_PROPERTIES = 2_000
"""Limit of one object: compilation and masks take time quadratic in their number."""

Ranges = tuple[tuple[int, int], ...]
"""Code points in ascending ranges with both ends included."""

_LAST = 0x10FFFF
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_ECMA_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_STARTS = ("AT_BEGINNING", "AT_BEGINNING_STRING")
_REFUSED = {
    "ASSERT": "lookahead and lookbehind `(?=...)`, `(?<=...)`",
    "ASSERT_NOT": "negative lookahead and lookbehind `(?!...)`, `(?<!...)`",
    "AT": r"an anchor or boundary (`^`, `$`, `\A`, `\Z`, `\b`, `\B`) other than at its ends",
    "ATOMIC_GROUP": "an atomic group `(?>...)`",
    "GROUPREF": r"a backreference `\1`, `(?P=name)`",
    "GROUPREF_EXISTS": "a conditional group `(?(1)...)`",
    "POSSESSIVE_REPEAT": "a possessive quantifier `*+`, `++`, `?+`",
}
_ESCAPES = (
    r"\\[xu]\{(?P<code>[0-9a-fA-F]{1,6})\}|(?P<property>\\[pP](?:\{[\w=.^-]{1,40}\}|[A-Z]))|\\."
)
_IN_SET = re.compile(_ESCAPES + r"|(?P<bracket>\[)", re.DOTALL)
_EXTENDED = re.compile(
    _ESCAPES + r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<name>\(\?<(?![=!]))", re.DOTALL
)
_AMBIGUOUS_SET = re.compile(r"\[[:.=]|--|&&|\|\||~~")
_PLACEHOLDERS = tuple(range(0xFDD0, 0xFDF0))  # noncharacters: no text contains them

_GUIDANCE = frozenset({"whitespace_flexible", "whitespace_pattern", "item_separator"}) | {
    "key_separator"
}
"""Options of the library in a schema of a Lark grammar that lift no restriction."""

_TERMINAL = re.compile(r"\b_?[A-Z][_A-Z0-9-]*\b")
_DEFINITION = re.compile(r"^[ \t]*[?!]*(_?[A-Za-z][\w-]*)[^\n:|]*:", re.MULTILINE)

_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|<[^<>\s]+>|(?P<json>%json\b\s*)'
    r"|/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)",
    re.DOTALL,
)


class DialectRewriter:
    """Rewrites the parts of one structure, whose expressions have a limit together."""

    def __init__(self) -> None:
        self._left = MAX_REGEX_TEXT

    def regex(
        self, text: str, *, search: bool = False, anchors: bool = True, flags: int = 0
    ) -> str:
        r"""Rewrite a regular expression to one that matches the same whole texts.

        Args:
            text: the expression, in the syntax of Python's `re`; `\p{...}`, `\x{...}` and
                `(?<name>...)` of other dialects are read too.
            search: the expression may match any part of a text, as `pattern` of JSON Schema does;
                `.` then has only what both Python and ECMA-262 have.
            anchors: `^` and `$` may stand at the ends.
            flags: flags of `re`.

        Raises:
            ValueError: invalid, too large, or syntax that no mask can keep.
        """
        source, properties = _plain(text)
        writer = _Writer(properties, search=search, max_characters=self._left)
        try:
            written, length = writer.pattern(_parser.parse(source, flags), anchors=anchors)
        except re.error as error:
            raise ValueError(f"regex parse error: {error}") from None
        except (OverflowError, RecursionError):
            raise ValueError(
                "regex parse error: too large counts or groups nested too deep"
            ) from None
        if length > MAX_REGEX_LENGTH:
            raise ValueError(
                f"the regex is too large: it stands for texts of {length:,} characters, expected "
                f"at most {MAX_REGEX_LENGTH:,}: lower the counts of its quantifiers, or use `*`"
            )
        self._left = writer.left
        return written

    def schema(self, text: str) -> str:
        """Rewrite a JSON schema, given as JSON text.

        Raises:
            ValueError: a keyword or value that cannot be kept; states where.
        """
        return json.dumps(_Schema(json.loads(text), self).rewritten(), ensure_ascii=False)

    def lark(self, text: str) -> str:
        """Rewrite the expressions and schemas of a Lark grammar."""
        _check_terminals(_LARK.sub(lambda found: " " if found[0][0] != "%" else found[0], text))
        parts, position = [], 0
        while (found := _LARK.search(text, position)) is not None:
            parts.append(text[position : found.start()])
            position = found.end()
            if found["regex"] is not None:
                named = {flag: getattr(re, flag.upper()) for flag in "imsx"}
                flags = sum(named.get(flag, 0) for flag in set(found["flags"]))
                parts.append(f"/{self.regex(found['regex'], anchors=False, flags=flags)}/")
                continue
            parts.append(found[0])
            if found["json"] is not None:
                try:
                    schema, position = json.JSONDecoder().raw_decode(text, position)
                except ValueError as error:
                    raise ValueError(f"invalid JSON after %json: {error}") from None
                options = schema.pop("x-guidance", {}) if isinstance(schema, dict) else {}
                if not isinstance(options, dict) or options.keys() - _GUIDANCE:
                    raise ValueError(f"expected x-guidance to have {', '.join(sorted(_GUIDANCE))}")
                schema = _Schema(schema, self).rewritten()
                if options:
                    schema["x-guidance"] = options
                parts.append(json.dumps(schema))
        return "".join(parts) + text[position:]


def _check_terminals(text: str) -> None:
    """Check how deeply terminals use each other: masks and compilation recurse along them."""
    starts = [*_DEFINITION.finditer(text), None]
    uses: dict[str, set[str]] = {}
    for one, following in itertools.pairwise(starts):
        assert one is not None
        body = text[one.end() : following.start() if following is not None else len(text)]
        if one[1].isupper():
            uses.setdefault(one[1], set()).update(_TERMINAL.findall(body))
    if text.count("&") > MAX_INTERSECTED:
        raise ValueError(f"the grammar is too large: more than {MAX_INTERSECTED} operators `&`")
    deep = set(uses)
    for _ in range(MAX_TERMINAL_DEPTH):  # each round leaves those that use one of the last round
        deep = {name for name in deep if not uses[name].isdisjoint(deep)}
    if deep:
        raise ValueError(
            f"the grammar is too large: its terminals use each other more than "
            f"{MAX_TERMINAL_DEPTH} levels deep, such as {min(deep)[:40]}: write rules (with "
            "lowercase names), or join terminals"
        )


# ---- regular expressions -------------------------------------------------------------------------


def _plain(text: str) -> tuple[str, Mapping[int, str]]:
    """Replace syntax of other dialects that Python refuses; properties get placeholders."""
    properties: dict[str, int] = {}
    free = [code for code in _PLACEHOLDERS if chr(code) not in text]

    def plain(found: re.Match[str]) -> str:
        match found.lastgroup:
            case "code" if int(found["code"], 16) <= _LAST:
                return f"\\U{int(found['code'], 16):08x}"
            case "property":
                if found[0] not in properties and len(properties) == len(free):
                    raise ValueError(f"the regex has more than {len(free)} properties `\\p`")
                return chr(
                    properties.setdefault(found[0], free[min(len(properties), len(free) - 1)])
                )
            case "bracket":
                return "\\["
            case "set":
                _check_set(found[0])
                return "[" + _IN_SET.sub(plain, found[0][1:])
            case "name":
                return "(?P<"
            case _:
                return found[0]

    written = _EXTENDED.sub(plain, text)
    return written, {code: name for name, code in properties.items()}


def _check_set(text: str) -> None:
    ambiguous = _AMBIGUOUS_SET.search(re.sub(r"\\.", "xx", text, flags=re.DOTALL))
    if ambiguous is not None:
        raise ValueError(
            f"`{ambiguous[0]}` in the set `{text[:40]}` has another meaning in each dialect of "
            "regular expressions: POSIX classes such as [:alpha:] and operations of sets are not "
            r"supported; write ranges such as [a-zA-Z], and `\[`, `\-`, `\&` for the characters"
        )


class _Writer:
    """Writes a tree of Python's parser in syntax that all dialects read alike."""

    def __init__(self, properties: Mapping[int, str], *, search: bool, max_characters: int) -> None:
        self._properties, self._search = properties, search
        self.left = max_characters
        self._classes: dict[object, str] = {}

    def pattern(self, tree: Any, *, anchors: bool) -> tuple[str, int]:
        """Return the expression and the length of the longest text that it stands for."""
        return self._items(tree.data, tree.state.flags, first=anchors, last=anchors)

    def _items(self, items: Any, flags: int, *, first: bool, last: bool) -> tuple[str, int]:
        """Write a sequence."""
        rest, multiline = list(items), flags & re.MULTILINE
        while first and rest and _is_anchor(rest[0], _STARTS) and not multiline:
            rest, first = rest[1:], not self._search
        while last and rest and _is_anchor(rest[-1], ("AT_END", "AT_END_STRING")) and not multiline:
            rest, last = rest[:-1], not self._search
        begins = self._search and first and not (rest and _is_group(rest[0]))
        ends = self._search and last and not (rest and _is_group(rest[-1]))
        parts = [
            self._item(
                item, flags, first=first and index == 0, last=last and index == len(rest) - 1
            )
            for index, item in enumerate(rest)
        ]
        text, length = _joined(parts)
        return ("(?s:.)*" if begins else "") + text + ("(?s:.)*" if ends else ""), length

    def _item(self, item: Any, flags: int, *, first: bool, last: bool) -> tuple[str, int]:
        kind, value = str(item[0]), item[1]
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                key = kind, tuple(value) if kind == "IN" else value, flags
                if key not in self._classes:
                    self._classes[key] = self._class(kind, value, flags)
                self.left -= len(self._classes[key])
                if self.left < 0:
                    raise ValueError(
                        "the regex is too large: it has too many classes of Unicode: use fewer, "
                        r"or write `[^0-9A-Za-z_]` for `\W`"
                    )
                return self._classes[key], 1
            case "BRANCH":
                options = [self._items(one, flags, first=first, last=last) for one in value[1]]
                written = "|".join(text for text, _ in options)
                return f"(?:{written})", max(length for _, length in options)
            case "SUBPATTERN":
                _, added, removed, inner = value
                text, length = self._items(
                    inner, (flags | added) & ~removed, first=first, last=last
                )
                return f"(?:{text})", length
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, inner = value
                text, length = self._items(inner, flags, first=False, last=False)
                is_open = high == _parser.MAXREPEAT
                count = f"{{{low},{'' if is_open else high}}}"
                return f"(?:{text}){count}" if high else "", length * (low + 1 if is_open else high)
            case _:
                raise ValueError(f"the regex has {_REFUSED.get(kind, kind)}: not supported")

    def _class(self, kind: str, value: Any, flags: int) -> str:
        if kind == "ANY":
            without = ((0x0A, 0x0A),) if not self._search else _ECMA_LINE_ENDS
            return _written(_complement(() if flags & re.DOTALL else without))
        members = [(kind.removeprefix("NOT_"), value)] if kind != "IN" else list(value)
        negated = kind == "NOT_LITERAL" or str(members[0][0]) == "NEGATE"
        ranges: list[tuple[int, int]] = []
        properties = []
        categories = {str(member) for name, member in members if str(name) == "CATEGORY"}
        for name, member in members:
            match str(name):
                case "LITERAL" if member in self._properties:
                    properties.append(self._properties[member])
                case "LITERAL":
                    ranges += _with_cases(member, member, flags)
                case "RANGE":
                    if not self._properties.keys().isdisjoint(member):
                        raise ValueError(r"a range of a set ends in a property `\p{...}`")
                    ranges += _with_cases(member[0], member[1], flags)
                case "CATEGORY":
                    ranges += _category(str(member), flags, negated=negated)
                    if "_NOT_" in str(member) and str(member).replace("_NOT_", "_") in categories:
                        ranges.append((0, _LAST))  # `[\w\W]` has every character
                case _:  # that the set is negated
                    pass
        if properties:
            found = "".join(properties) + _written(_merged(ranges), brackets=False)
            return f"[{'^' if negated else ''}{found}]"
        return _written(_complement(ranges) if negated else _merged(ranges))


def _is_group(item: Any) -> bool:
    return str(item[0]) in ("SUBPATTERN", "BRANCH")


def _is_anchor(item: Any, names: tuple[str, ...]) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _joined(parts: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """Join a sequence; equal groups in a row become one repetition, which is smaller to compile."""
    runs: list[tuple[str, int]] = []
    length = 0
    for text, size in parts:
        length += size
        if runs and runs[-1][0] == text and text.startswith("(?:"):
            runs[-1] = text, runs[-1][1] + 1
        elif text:
            runs.append((text, 1))
    return "".join(text if n == 1 else f"(?:{text}){{{n}}}" for text, n in runs), length


def _written(ranges: Ranges, *, brackets: bool = True) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1] and brackets:
        character = chr(ranges[0][0])
        is_plain = character.isascii() and character.isalnum()
        return character if is_plain else f"\\x{{{ord(character):X}}}"
    if not ranges and brackets:
        raise ValueError("a class of the regex has no character")
    inner = "".join(
        f"\\x{{{low:X}}}" if low == high else f"\\x{{{low:X}}}-\\x{{{high:X}}}"
        for low, high in ranges
    )
    return f"[{inner}]" if brackets else inner


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort ranges and join those that touch; without surrogates, which no text has."""
    return _complement(_complement(ranges))


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found, start = [], 0
    for low, high in (*sorted((*ranges, *_SURROGATES)), (_LAST + 1, _LAST + 1)):
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return tuple(found)


@lru_cache(maxsize=16)
def _matched(pattern: str, flags: int) -> Ranges:
    every = "".join(map(chr, range(_LAST + 1)))
    spans = (one.span() for one in re.finditer(f"{pattern}+", every, flags))
    return _merged((start, end - 1) for start, end in spans)


def _category(name: str, flags: int, *, negated: bool) -> Ranges:
    r"""The characters of `\d`, `\s`, `\w` or their complements.

    Those that Python and ECMA-262 both have, or in a negated set either has: ASCII digits for `\d`,
    and no digit of Unicode for `\D` and `[^\d]`. With `(?a)` all are those of Python.
    """
    letter = name.rsplit("_", 1)[-1][0].lower()
    is_inverse = "_NOT_" in name
    is_ascii = bool(flags & re.ASCII) or negated == is_inverse
    found = _matched(f"\\{letter}", re.ASCII if is_ascii else 0)
    if not is_ascii and letter == "s":
        found = _merged((*found, (0xFEFF, 0xFEFF)))  # whitespace of ECMA-262 only
    return _complement(found) if is_inverse else found


def _with_cases(low: int, high: int, flags: int) -> list[tuple[int, int]]:
    """A range of a class, with all cases of its letters if the flags ignore case."""
    found = [(low, high)]
    if flags & re.IGNORECASE:
        cased = _cased()
        inside = cased[bisect_left(cased, chr(low)) : bisect_right(cased, chr(high))]
        found += [(ord(c), ord(c)) for one in inside for c in _cases(one, flags & re.ASCII)]
    return found


@lru_cache(maxsize=1)
def _cased() -> str:
    """All characters that have another case; none is above this bound."""
    every = map(chr, range(0x1F000))
    return "".join(one for one in every if one.lower() != one or one.upper() != one)


@lru_cache(maxsize=4096)
def _cases(character: str, flags: int) -> tuple[str, ...]:
    return tuple(re.findall(re.escape(character), _cased(), flags | re.IGNORECASE))


# ---- JSON schemas --------------------------------------------------------------------------------

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_EXACT = 2**53
"""Whole numbers up to this one are exact in the library, which reads 64-bit floats."""

_MAX_PASSES = 50

_UNSUPPORTED = frozenset(
    {"$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired"}
    | {"dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if", "maxContains"}
    | {"minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
    | {"uniqueItems", "x-guidance"}
)
"""Keywords that restrict the output, or the library's own, which lift restrictions."""

_WITHOUT_EFFECT: Mapping[str, object] = {
    "uniqueItems": False,
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
}

Node = dict[str, Any]


class _Schema:
    """Rewrites a schema in place, and follows its references to parts of the document."""

    def __init__(self, root: Any, rewriter: DialectRewriter) -> None:
        self._root, self._rewriter = root, rewriter
        self._nodes: dict[int, Node] = {}
        self._paths: dict[int, str] = {}
        self._targets: dict[int, Any] = {}
        self._todo: list[tuple[Node, str]] = []
        self._refers_by_name = re.search(r'"\$ref": "(?!#"|#/)', json.dumps(root)) is not None

    def rewritten(self) -> Any:
        self._schema(self._root, "")
        while self._todo:
            self._refer(*self._todo.pop())
        unbounded = self._nodes.keys() - self._finite()
        if unbounded:
            path = min((self._paths[one] for one in unbounded), key=len)
            raise ValueError(
                f"no JSON that ends matches {path or 'the schema'}: a `$ref` that leads back to "
                "its own schema is supported only in an optional property, in an array that may be "
                "empty, or as one of several options of anyOf"
            )
        for one, count in self._intersected().items():
            if count > MAX_INTERSECTED:
                raise ValueError(
                    f"{self._paths[one] or 'the schema'} is too large: a text must match more than "
                    f"{MAX_INTERSECTED} of `pattern` and `format` by `allOf` and `$ref`: join them"
                )
        return self._root

    def _schema(self, node: Any, path: str) -> None:
        if isinstance(node, bool) or id(node) in self._nodes:
            return
        if not isinstance(node, dict):
            raise _unexpected(path, "a schema (an object or a boolean)", node)
        self._nodes[id(node)], self._paths[id(node)] = node, path
        members = _without_draft_4(node, path)
        node.clear()
        for keyword, value in members.items():
            where = f"{path}/{keyword}"
            if keyword in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[keyword]:
                continue
            if keyword in _UNSUPPORTED:
                raise ValueError(f"{where} is not supported: leave out the keyword {keyword!r}")
            read = _READERS.get(keyword)
            node[keyword] = value if read is None else read(self, value, where)
        _check_object(node, path)
        if "$ref" in node:
            self._todo.append((node, path))

    def _refer(self, node: Node, path: str) -> None:
        pointer = node["$ref"]
        if not isinstance(pointer, str):
            raise _unexpected(f"{path}/$ref", "a text", pointer)
        if pointer != "#" and not pointer.startswith("#/"):
            return
        target = self._root
        for step in unquote(pointer).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise ValueError(f"{path}/$ref names {pointer!r}, which the schema does not have")
        self._targets[id(node)] = target
        self._schema(target, pointer)

    def _options(self, value: Any, path: str) -> Any:
        if not isinstance(value, list) or not value:
            raise _unexpected(path, "a list of schemas that is not empty", value)
        for index, one in enumerate(value):
            self._schema(one, f"{path}/{index}")
        return value

    def _items(self, value: Any, path: str) -> Any:
        if isinstance(value, list) and value:
            return self._options(value, path)
        if value != []:
            self._schema(value, path)
        return value

    def _one(self, value: Any, path: str) -> Any:
        self._schema(value, path)
        return value

    def _members(self, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _unexpected(path, "an object of schemas", value)
        for name, one in value.items():
            self._schema(one, f"{path}/{name[:40]}")
        return value

    def _definitions(self, value: Any, path: str) -> Any:
        """Rewrite definitions; those that nothing refers to do not matter."""
        return self._members(value, path) if self._refers_by_name else value

    def _patterns(self, value: Any, path: str) -> Any:
        members = self._members(value, path)
        if len(members) > MAX_PATTERN_PROPERTIES:
            raise _unexpected(
                path, f"an object of at most {MAX_PATTERN_PROPERTIES} patterns", len(members)
            )
        found = {self._pattern(name, path): one for name, one in members.items()}
        if len(found) < len(members):
            raise ValueError(f"{path} has two patterns of the same names: join their schemas")
        return found

    def _pattern(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise _unexpected(path, "a text", value)
        try:
            return f"^(?:{self._rewriter.regex(value, search=True)})$"
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _finite(self) -> set[int]:
        """The schemas that JSON of a finite length can match: the least fixed point."""
        finite: set[int] = set()
        left = list(self._nodes.items())[::-1]  # references mostly lead to what is found later
        for _ in range(_MAX_PASSES):
            before = len(left)
            for one, node in left:
                if self._ends(node, finite):
                    finite.add(one)
            left = [item for item in left if item[0] not in finite][::-1]
            if len(left) == before:
                return finite
        return set(self._nodes)  # an unusual order of references: not decided

    def _intersected(self) -> Mapping[int, int]:
        """The number of expressions that a text of each schema must match, up to the limit."""
        counts = dict.fromkeys(self._nodes, 0)

        def count_of(one: Any) -> int:
            return counts.get(id(one), 0)

        for _ in range(_MAX_PASSES):
            before = dict(counts)
            for one, node in reversed(self._nodes.items()):
                own = ("pattern" in node) + ("format" in node)
                each = [*node.get("allOf", ()), self._targets.get(one)]
                some = [*node.get("anyOf", ()), *node.get("oneOf", ())]
                count = own + sum(map(count_of, each)) + max(map(count_of, some), default=0)
                counts[one] = min(count, MAX_INTERSECTED + 1)
            if counts == before:
                break
        return counts

    def _ends(self, node: Node, finite: set[int]) -> bool:
        def ends(one: Any) -> bool:
            return not isinstance(one, dict) or id(one) not in self._nodes or id(one) in finite

        each = [*node.get("allOf", ()), self._targets.get(id(node))]
        options = [node[name] for name in ("anyOf", "oneOf") if name in node]
        if not all(map(ends, each)) or not all(any(map(ends, some)) for some in options):
            return False
        kinds = node.get("type", _TYPES)
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        if "const" in node or "enum" in node or kinds - {"array", "object"}:
            return True
        members, others = node.get("properties", {}), node.get("additionalProperties")
        needed = [members.get(name, others) for name in node.get("required", ())]
        items = node.get("items")
        places = [*node.get("prefixItems", ()), *(items if isinstance(items, list) else ())]
        rest = node.get("additionalItems") if isinstance(items, list) else items
        least = node.get("minItems", 0)
        placed = [*places[:least], *([rest] if least > len(places) else ())]
        return ("object" in kinds and all(map(ends, needed))) or (
            "array" in kinds and all(map(ends, placed))
        )


def _unexpected(path: str, expected: str, value: object) -> ValueError:
    shown = json.dumps(value, ensure_ascii=True)[:40]
    return ValueError(f"expected {path or 'the schema'} to be {expected}, got {shown}")


def _without_draft_4(node: Node, path: str) -> Node:
    """Return the keywords in the form of draft 2020-12.

    `$schema` only selects a draft: all keywords are read, whichever draft has them.
    """
    members = {
        ("$id" if key == "id" else key): one for key, one in node.items() if key != "$schema"
    }
    for bound in ("Minimum", "Maximum"):
        key, plain = f"exclusive{bound}", bound.lower()
        if isinstance(members.get(key), bool):
            if members[key] and plain not in members:
                raise ValueError(
                    f"{path}/{key} is true, which needs `{plain}`: give the bound as the number "
                    f"of {key}"
                )
            if members.pop(key):
                members[key] = members.pop(plain)
    if not isinstance(members.get("$id", ""), str):
        del members["$id"]
    return members


def _check_object(node: Node, path: str) -> None:
    members, required = node.get("properties", {}), set(node.get("required", ()))
    optional = len(members.keys() - required)
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise ValueError(
            f"{path}/properties is too large: {optional:,} optional properties, expected at most "
            f"{MAX_OPTIONAL_PROPERTIES:,}: list more of them in `required`, or split the object"
        )
    if node.get("minProperties", 0) > len(required) + 1:
        raise ValueError(
            f"{path}/minProperties cannot be kept above the number of `required` properties plus "
            "one, since names that are not listed may repeat: list more names in `required`"
        )


def _count(_: _Schema, value: Any, path: str) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if not is_whole or not 0 <= value < 2**63:
        raise _unexpected(path, "a whole number of 0 or more", value)
    return int(value)


def _number(_: _Schema, value: Any, path: str) -> int | float:
    """Check a bound; one that the library would round is moved inwards."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _unexpected(path, "a number", value)
    if path.endswith("multipleOf"):
        digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits)).rstrip("0")
        if not 0 < value <= MAX_MULTIPLE_OF or int(digits) > MAX_MULTIPLE_OF:
            expected = f"a number above 0 and up to {MAX_MULTIPLE_OF:,}, with up to 5 digits"
            raise _unexpected(path, expected, value)
    if abs(value) <= _EXACT:
        return value
    inward = math.inf if path.lower().endswith("minimum") else -math.inf
    if abs(value) > 1e300:
        raise _unexpected(path, "a number from -1e300 to 1e300", value)
    rounded = float(value)
    is_inside = rounded >= value if inward > 0 else rounded <= value
    if not is_inside or "exclusive" in path.rsplit("/", 1)[-1]:
        rounded = math.nextafter(rounded, inward)
    return rounded


def _names(_: _Schema, value: Any, path: str) -> Any:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _unexpected(path, "a list of names in the object that has the properties", value)
    return value


def _text(_: _Schema, value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(path, "a text", value)
    return value


def _kinds(_: _Schema, value: Any, path: str) -> Any:
    kinds = value if isinstance(value, list) else [value]
    if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
        raise ValueError(f"Invalid type: expected {path} to be of {', '.join(_TYPES)}")
    return value


def _constant(_: _Schema, value: Any, path: str) -> Any:
    level = [value]
    while level:
        one = level.pop()
        if isinstance(one, dict | list):
            level += one.values() if isinstance(one, dict) else one
        elif isinstance(one, int | float) and abs(one) > _EXACT:
            raise _unexpected(path, f"numbers from {-_EXACT} to {_EXACT}", one)
    return value


def _constants(schema: _Schema, value: Any, path: str) -> Any:
    if not isinstance(value, list) or not value:
        raise _unexpected(path, "a list of values that is not empty", value)
    return _constant(schema, value, path)


_READERS: Mapping[str, Callable[[_Schema, Any, str], Any]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
    "multipleOf": _number,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _count),
    **dict.fromkeys(("minProperties", "maxProperties"), _count),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Schema._options),
    **dict.fromkeys(("$defs", "definitions"), _Schema._definitions),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _Schema._one),
    "items": _Schema._items,
    "properties": _Schema._members,
    "patternProperties": _Schema._patterns,
    "pattern": _Schema._pattern,
    "format": _text,
    "required": _names,
    "type": _kinds,
    "const": _constant,
    "enum": _constants,
}
