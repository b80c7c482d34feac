"""The version of the zoo, which the package and the folders of compiled regions name."""

__version__ = "0.1.0"
