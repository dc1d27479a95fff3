"""Words, sentences and filler texts from which tasks build prompts."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Split = Literal["train", "eval"]
WordKind = Literal["adjective", "noun", "name", "place"]

_ADJECTIVES = """
able amber ample angry arctic atomic azure bitter blank blond blunt bold brave brief bright brisk
broad broken bronze brown calm careful cheap clean clear clever close cloudy coarse cold common
cool coral crisp cruel curly curved damp daring dark deep dense distant dizzy double dry dull
dusty eager early easy eastern elder empty equal even exact extra faint fair fancy fast fierce
final fine firm flat fluffy foreign formal frank free fresh frosty gentle giant glad global golden
grand grave great greedy green grey guilty handy happy harsh hasty heavy hidden hollow honest huge
humble hungry icy ideal idle jolly keen kind large late lazy lean light little lively lonely long
loose loud loyal lucky mad mellow merry mild minor misty modern modest muddy narrow native neat
new nice noble noisy normal northern odd open orange outer pale patient perfect plain pleasant
polite poor pretty prime proud public pure purple quick quiet rapid rare ready real regular rich
ripe rough round royal rude rural rusty sad safe scarlet secret serious shallow sharp shiny short
shy silent silver simple single sleepy slim slow small smart smooth soft solid sour southern spare
special spicy square stable steady steep stiff still strange strict strong sturdy sudden sunny
super sweet swift tall tame tender thick thin thirsty tidy tight tiny tough true urban usual vast
violet vital vivid warm weak wealthy western wet white wide wild wise wooden woolly worthy yellow
young
"""

_NOUNS = """
acorn actor anchor animal ankle apple apron arrow artist autumn badge baker banner barn barrel
basket battery beach beacon bean bear beaver bell bench berry bird blade blanket board boat bone
book bottle bowl box branch brass bread brick bridge broom brush bucket bugle bunker button cabin
cable cactus camel camera candle candy cannon canoe canvas captain carpet carrot castle cattle
cellar chain chair chalk chapel cherry chest chimney circle circus clock cloth cloud coast cobra
coffee comet copper corner cotton cousin cradle crayon creek cricket crown crystal curtain dagger
daisy dancer desert diamond doctor dragon drawer drum eagle earth easel engine engineer falcon
farmer feather fence ferry fiddle field finger fire fish flag flame flower flute forest fork
fountain fox garden gate giraffe glacier glove goat goose grape guitar hammer harbor hat hawk
hazel helmet hill honey hook horse hotel hunter island ivory jacket jar jewel judge jungle kettle
king kitchen kite knife ladder lake lamp lantern leaf lemon lens letter lily lion lizard lock
lotus lumber magnet mango maple marble market mask meadow medal melon mirror monkey moon mountain
mouse museum mushroom music needle nest novel oak oasis ocean olive onion orchard otter oven owl
oyster paddle painter palace panda paper parrot pasta peach pearl pebble pencil pepper piano
pigeon pilot pirate planet plate plum pocket poet pond poster potato powder prince puzzle quarry
queen rabbit radio raft rain raven ribbon river road robin robot rocket roof rope rose ruby sailor
salmon sand school scissors sheep shell ship shoe signal singer soldier spider spoon squirrel star
statue stone storm street sugar summer sword table tailor teacher temple tent thunder tiger timber
tower train tree trumpet tulip tunnel turtle uncle valley velvet village violin volcano wagon
walnut water whale wheel whistle willow window winter wolf yard zebra
"""

_NAMES = """
Adam Agnes Albert Alice Amos Anna Arthur Beatrice Ben Bertha Bruno Carl Carol Cecil Clara Cyril
Daisy Daniel David Dora Edgar Edith Edward Ella Emma Eric Ernest Esther Eva Felix Fiona Flora
Frank Fred Gerald Gloria Grace Greta Harold Harry Helen Henry Hugo Ida Irene Isaac Jack James Jane
Joan John Joseph Julia Karl Kate Laura Leo Lily Louis Lucy Mabel Mark Martha Martin Mary Max
Mildred Nancy Ned Nora Oliver Oscar Otto Paul Peggy Peter Philip Ralph Robert Rosa Rufus Ruth Sam
Sarah Simon Sophie Stella Susan Theodore Thomas Tom Ursula Victor Viola Walter William Winifred
"""

_PLACES = """
Athens Berlin Boston Bristol Cairo Calcutta Canada Chicago Copenhagen Cork Delhi Denver Devon
Dover Dublin Egypt Exeter Florence France Geneva Ghent Glasgow Hamburg Havana Holland Iceland
India Ireland Italy Japan Kent Leeds Lima Lisbon London Lyons Madrid Malta Mexico Milan Moscow
Naples Norway Ohio Oxford Paris Persia Peru Poland Prague Quebec Rome Russia Scotland Siam Spain
Sweden Texas Tokyo Turin Venice Vienna Wales Warsaw York Zurich
"""

_CLASSES = {
    "animal": """
        dog cat cow pig sheep goat lion tiger bear wolf fox horse mouse rat rabbit deer camel
        monkey donkey otter
    """,
    "fruit": """
        apple pear plum peach cherry grape lemon orange melon fig mango banana berry apricot date
        olive lime currant quince pineapple
    """,
    "body": """
        hand foot arm leg head nose ear eye mouth neck knee elbow finger thumb shoulder chin cheek
        heart back toe
    """,
    "cloth": """
        hat coat shoe shirt glove scarf sock boot belt dress cap cloak apron gown vest skirt
        jacket bonnet stocking collar
    """,
    "house": """
        door window roof floor wall table chair bed lamp stove shelf stairs cellar kitchen bedroom
        carpet curtain cupboard chimney sofa
    """,
    "sky": """
        sun moon star cloud rain snow wind storm fog thunder lightning frost hail mist sky planet
        comet rainbow breeze dawn
    """,
    "job": """
        doctor baker farmer sailor soldier teacher judge priest tailor cook nurse lawyer painter
        singer carpenter hunter miller pilot clerk porter
    """,
    "water": """
        river lake sea ocean pond stream brook well pool bay harbor beach island wave shore canal
        creek spring fountain swamp
    """,
}

CLASS_NAMES = tuple(sorted(_CLASSES))

LABELS = (
    *("red", "blue", "gold", "green", "black", "white", "pink", "grey"),
    *("one", "two", "three", "four", "yes", "no", "left", "right"),
)


def _part(words: str, split: Split, *, train_share: float) -> tuple[str, ...]:
    """Split a list in two after a shuffle that depends only on its length."""
    shuffled = sorted(set(words.split()))
    random.Random(len(shuffled)).shuffle(shuffled)
    cut = int(train_share * len(shuffled))
    return tuple(shuffled[:cut] if split == "train" else shuffled[cut:])


@cache
def vocabulary(kind: WordKind, split: Split) -> tuple[str, ...]:
    """The words of one kind in a split: 80 % train, 20 % eval, no overlap."""
    lists: dict[WordKind, str] = {
        "adjective": _ADJECTIVES,
        "noun": _NOUNS,
        "name": _NAMES,
        "place": _PLACES,
    }
    return _part(lists[kind], split, train_share=0.8)


@cache
def class_words(class_name: str, split: Split) -> tuple[str, ...]:
    """The words of one meaning class (animals, fruit, ...): 75 % train, 25 % eval."""
    return _part(_CLASSES[class_name], split, train_share=0.75)


Filler = Callable[[random.Random, int], str]
"""(random state, characters) -> neutral text of about this many characters."""

_SUBJECTS = (
    *("The old man", "A young girl", "The farmer", "My brother", "The captain"),
    *("Her aunt", "The gardener", "A stranger", "The miller", "Our teacher"),
)
_VERBS = (
    *("walked", "looked", "went slowly", "ran", "stood quietly"),
    *("waited", "sat down", "sang", "turned", "slept"),
)
_FILLER_PLACES = (
    *("by the river", "in the garden", "under the trees", "at the gate", "near the church"),
    *("on the hill", "along the road", "in the kitchen", "beside the fire", "at the market"),
)


def synthetic_filler(rng: random.Random, characters: int) -> str:
    """Short generated sentences, easier to distinguish from records than prose; no file needed."""
    text = ""
    while len(text) < characters:
        text += f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_FILLER_PLACES)}. "
    return text[:characters].rsplit(" ", 1)[0]


@dataclass(frozen=True, slots=True)
class BookFiller:
    """Slices of one long text, cut at spaces.

    Attributes:
        text: the whole text; a slice begins anywhere except in the last 400 characters.
    """

    text: str

    def __call__(self, rng: random.Random, characters: int) -> str:
        if characters <= 0:
            return ""
        start = rng.randrange(max(1, len(self.text) - characters - 400))
        blank = self.text.find(" ", start)
        if 0 <= blank <= start + 200:
            start = blank + 1
        end = self.text.rfind(" ", start, start + characters)
        return self.text[start : end if end > start else start + characters]


# The book text that records are hidden in, shipped with the package (see assets/haystack.md).


@cache
def haystack() -> BookFiller:
    """A filler of 195,000 characters of public-domain prose, not in quire-tiny's training data."""
    return BookFiller(book_text())


def book_text() -> str:
    """The whole haystack text."""
    return (files("quire") / "assets" / "haystack.txt").read_text(encoding="ascii")
