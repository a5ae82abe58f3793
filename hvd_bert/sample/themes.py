"""The content of the sample's passages: names, facts and sentences of an invented world.

Nothing here is real or copied. `generate.py` combines these pieces. `RELATIONS` lists the facts of a thing: how a
passage states each fact (`predicates`, which follow the subject; `{v}` is the value) and how a question asks for it
(`questions`; `{e}` is the thing's name).
"""

from __future__ import annotations

from dataclasses import dataclass

# A composed name is a start and an end, so that even an unseen name consists of seen pieces.
PLACE_STARTS = ("bren", "cald", "dun", "elm", "farl", "grim", "hav", "kel", "lind", "mor", "nor", "oster", "pel",
                "quar", "rav", "sel", "thorn", "ulv", "vel", "wyn", "yar", "zel", "bir", "harr")
PLACE_ENDS = ("holt", "mere", "wick", "ford", "stead", "bury", "haven", "gate", "combe", "moor", "dale", "mouth",
              "ness", "thwaite", "beck", "minster")
SURNAME_STARTS = ("tol", "ack", "bar", "cren", "dor", "ell", "fen", "gar", "hob", "jes", "kast", "lor", "mab",
                  "nav", "ost", "pim", "rud", "sten", "tam", "var", "whit", "yel", "zim", "brod")
SURNAME_ENDS = ("vick", "brand", "ley", "man", "sen", "worth", "lund", "field", "kin", "croft", "dell", "berg",
                "shaw", "more", "quist", "well")
WOMEN = ("Mara", "Ilse", "Brida", "Nella", "Tessa", "Odile", "Ruth", "Sanna", "Vera", "Wilma", "Agnes", "Clara",
         "Edith", "Freya", "Greta", "Hedda", "Jonna", "Karin", "Livia", "Petra")
MEN = ("Anton", "Boris", "Cyril", "Dirk", "Emil", "Felix", "Gustav", "Henrik", "Ivan", "Jonas", "Klaus", "Lukas",
       "Magnus", "Nils", "Oscar", "Pavel", "Rolf", "Simon", "Tobias", "Ulrik")
SHIP_FIRST = ("Grey", "Golden", "Silent", "Northern", "Merry", "Proud", "Swift", "Crimson", "Lucky", "Brave",
              "Ancient", "Gentle", "Bright", "Lonely", "Royal", "Humble")
SHIP_SECOND = ("Heron", "Swallow", "Dolphin", "Lantern", "Maiden", "Falcon", "Thistle", "Mermaid", "Otter",
               "Pilgrim", "Comet", "Raven", "Sparrow", "Trader", "Anchor", "Badger")
TREASURES = ("Clock", "Organ", "Bell", "Fountain", "Statue", "Globe", "Telescope", "Tapestry")
HEIRLOOMS = ("Carriage", "Violin", "Crown", "Mirror", "Table", "Harp", "Sword", "Vase")
# Last sentences of passages. Their lengths vary, so that a passage's length does not reveal the position of a value.
ASIDES = ("", "Listen.", "Look here.", "This is known.", "Few people know this.", "There is an old letter.",
          "Nobody is quite sure of this.", "Children are told this story at school.",
          "A small book in the museum tells more.", "Many things are said, but not all is true.")
COMPOSED = ((PLACE_STARTS, PLACE_ENDS), (SURNAME_STARTS, SURNAME_ENDS))


@dataclass(frozen=True)
class Relation:
    """One kind of fact."""

    predicates: tuple[str, ...]
    questions: tuple[str, ...]


# Kind of thing (see passages.py) -> titles of articles about it; `{p}` is a place.
THEMES = {
    "ship": ("Ships of {p}", "The fleet of {p}", "Sailing out of {p}"),
    "treasure": ("Treasures around {p}", "A walk from {p}", "A guide to the {p} valley"),
    "heirloom": ("Old families of {p}", "The attics of {p}", "The museum of {p}"),
}

# Kind of value -> facts with such a value; a passage states several of them. The facts have no natural order, such as
# time, so that a value alone does not reveal its fact.
RELATIONS = {
    "person": (
        Relation(("was designed by {v}", "was planned by {v}", "followed a drawing by {v}"),
                 ("Who designed {e}?", "Who planned {e}?", "Whose drawing did {e} follow?")),
        Relation(("belonged to {v}", "was owned by {v}", "was the property of {v}"),
                 ("To whom did {e} belong?", "Who owned {e}?", "Whose property was {e}?")),
        Relation(("was looked after by {v}", "was kept clean by {v}", "was in the care of {v}"),
                 ("Who looked after {e}?", "Who kept {e} clean?", "In whose care was {e}?"))),
    "place": (
        Relation(("was built in {v}", "was made in {v}", "came from a workshop in {v}"),
                 ("Where was {e} built?", "In which town was {e} made?", "From which workshop did {e} come?")),
        Relation(("was stolen in {v}", "was taken by thieves at {v}", "fell to robbers near {v}"),
                 ("Where was {e} stolen?", "Where did thieves take {e}?", "Where did {e} fall to robbers?")),
        Relation(("was sold in {v}", "changed hands in {v}", "found a buyer in {v}"),
                 ("Where was {e} sold?", "In which town did {e} change hands?", "Where did {e} find a buyer?"))),
    "year": (
        Relation(("was repaired in {v}", "was mended in {v}", "was made as good as new in {v}"),
                 ("When was {e} repaired?", "When was {e} mended?", "When was {e} made as good as new?")),
        Relation(("was shown to the queen in {v}", "pleased the queen in {v}", "had a royal guest in {v}"),
                 ("When was {e} shown to the queen?", "When did {e} please the queen?",
                  "When did {e} have a royal guest?")),
        Relation(("was painted green in {v}", "was given a green coat in {v}", "became green in {v}"),
                 ("When was {e} painted green?", "When was {e} given a green coat?", "When did {e} become green?"))),
}


def all_text() -> list[str]:
    """Every list entry and sentence above except the parts of composed names, for the vocabulary."""
    text = [*WOMEN, *MEN, *SHIP_FIRST, *SHIP_SECOND, *TREASURES, *HEIRLOOMS, *ASIDES, "the", "it", "and"]
    for titles in THEMES.values():
        text += titles
    for relations in RELATIONS.values():
        for relation in relations:
            text += [*relation.predicates, *relation.questions]
    return text
