"""A class does not run ``__init_subclass__`` again: not in the ranks, and not here if it comes
from a rank.
"""

from script_checks import same

from parawrap import Platform

platform = Platform(device="cpu", n_cpus=2, verbose=False)


class Base:
    known = {}  # noqa: RUF012 (a registry of the class)

    def __init_subclass__(cls, *, name, **others):
        super().__init_subclass__(**others)
        assert name not in Base.known
        Base.known[name] = cls.title = name


class Part(Base, name="part"):
    pass


def use(part):
    class Inner(Part, name="inner"):
        pass

    return list(Base.known), part.title, type(part) is Part, Inner()


with platform.open() as ranks:
    *found, inner = ranks(use, Part())[0]
    same(found, [["part", "inner"], "part", True])
    same((inner.title, isinstance(inner, Part), list(Base.known)), ("inner", True, ["part"]))

    class Later(Base, name="later"):
        pass

    same(list(Base.known), ["part", "later"])
