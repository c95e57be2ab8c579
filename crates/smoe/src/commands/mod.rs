//! One file for each subcommand.

pub(crate) mod chat;
pub(crate) mod demo;
pub(crate) mod eval;
pub(crate) mod inspect;
pub(crate) mod pack;
pub(crate) mod run;
pub(crate) mod verify;
