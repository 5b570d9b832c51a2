//! Files of a crate import each other in one direction only.
//!
//! A module and its submodules count as one: a type's methods may be in several files. Tests are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, UseTree};

/// Path of a module from the root of its crate.
type Module = Vec<String>;

/// Reads all files below `dir`, the directory of `module`.
fn read(dir: &Path, module: &Module, files: &mut BTreeMap<Module, syn::File>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let mut inner = module.clone();
        if !["lib", "main", "mod"].contains(&name.as_str()) {
            inner.push(name);
        }
        if path.is_dir() {
            read(&path, &inner, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let file = syn::parse_file(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            files.insert(inner, file);
        }
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|a| {
        let mut of_test = false;
        if a.path().is_ident("cfg") {
            let _ = a.parse_nested_meta(|meta| {
                of_test |= meta.path.is_ident("test");
                Ok(())
            });
        }
        of_test
    })
}

/// The paths that a file names.
#[derive(Default)]
struct Paths(BTreeSet<Vec<String>>);

impl Paths {
    fn of_use(&mut self, before: &[String], tree: &UseTree) {
        let mut path = before.to_vec();
        match tree {
            UseTree::Path(p) => {
                path.push(p.ident.to_string());
                self.of_use(&path, &p.tree);
            }
            UseTree::Name(n) => {
                path.push(n.ident.to_string());
                self.0.insert(path);
            }
            UseTree::Rename(r) => {
                path.push(r.ident.to_string());
                self.0.insert(path);
            }
            UseTree::Glob(_) => drop(self.0.insert(path)),
            UseTree::Group(g) => g.items.iter().for_each(|item| self.of_use(before, item)),
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.of_use(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names = path.segments.iter().map(|s| s.ident.to_string());
        self.0.insert(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

/// The module of the item that `path` names in the module `from`.
fn target(from: &Module, path: &[String], modules: &BTreeSet<Module>) -> Option<Module> {
    let (first, rest) = path.split_first()?;
    let (mut at, rest) = match first.as_str() {
        "crate" => (Module::new(), rest),
        "self" => (from.clone(), rest),
        "super" => (from[..from.len().checked_sub(1)?].to_vec(), rest),
        _ => (from.clone(), path),
    };
    let mut found = false;
    for name in rest {
        if name == "super" {
            at.pop()?;
            continue;
        }
        at.push(name.clone());
        if !modules.contains(&at) {
            at.pop();
            break;
        }
        found = true;
    }
    (found || first == "crate" || first == "super").then_some(at)
}

/// Whether one module contains the other.
fn are_one(a: &Module, b: &Module) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

/// Which modules each one imports.
fn imports(files: &BTreeMap<Module, syn::File>) -> BTreeMap<Module, BTreeSet<Module>> {
    let declared_for_tests: BTreeSet<Module> = files
        .iter()
        .flat_map(|(module, file)| {
            file.items.iter().filter_map(move |item| match item {
                Item::Mod(m) if is_test(&m.attrs) => {
                    Some([&module[..], &[m.ident.to_string()]].concat())
                }
                _ => None,
            })
        })
        .collect();
    let modules: BTreeSet<Module> = files.keys().cloned().collect();
    let of_tests = |m: &Module| declared_for_tests.iter().any(|t| m.starts_with(t));
    let found = files.iter().filter(|(module, _)| !of_tests(module));
    found
        .map(|(module, file)| {
            let mut paths = Paths::default();
            paths.visit_file(file);
            let targets = paths.0.iter().filter_map(|p| target(module, p, &modules));
            let others = targets.filter(|t| !are_one(t, module) && !of_tests(t));
            (module.clone(), others.collect())
        })
        .collect()
}

/// A chain of imports from a module back to itself.
fn cycle(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Option<Vec<Module>> {
    for start in imports.keys() {
        let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
        let mut todo = vec![start];
        while let Some(at) = todo.pop() {
            for next in imports.get(at).into_iter().flatten() {
                if next == start {
                    let mut way = vec![start.clone(), at.clone()];
                    let mut step = at;
                    while let Some(previous) = before.get(step) {
                        way.push((*previous).clone());
                        step = previous;
                    }
                    way.reverse();
                    return Some(way);
                }
                if next != start && !before.contains_key(next) {
                    before.insert(next, at);
                    todo.push(next);
                }
            }
        }
    }
    None
}

/// Groups of more than one module in which each module imports all others, directly or not.
fn import_groups(imports: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reached = |start: &Module| {
        let mut found = BTreeSet::new();
        let mut todo = vec![start];
        while let Some(at) = todo.pop() {
            let next = imports.get(at).into_iter().flatten();
            todo.extend(next.filter(|next| found.insert((*next).clone())));
        }
        found
    };
    let from: BTreeMap<_, _> = imports.keys().map(|m| (m, reached(m))).collect();
    let both = |a: &Module, b: &Module| from[a].contains(b) && from[b].contains(a);
    let group = |m: &Module| -> BTreeSet<Module> {
        let others = from.keys().copied().filter(|other| both(m, other));
        others.cloned().collect()
    };
    let all = imports.keys().map(group);
    all.filter(|group| group.len() > 1).collect()
}

/// A file of the workspace.
fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn imports_in(krate: &str) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut files = BTreeMap::new();
    read(&workspace(krate).join("src"), &Module::new(), &mut files);
    assert!(files.len() > 3, "{krate}: {} files", files.len());
    imports(&files)
}

fn named(modules: impl IntoIterator<Item = Module>, between: &str) -> String {
    let names: Vec<_> = modules.into_iter().map(|m| m.join("::")).collect();
    names.join(between)
}

fn cycle_in(krate: &str) -> Option<String> {
    let way = cycle(&imports_in(krate))?;
    Some(format!("{krate}: {}", named(way, " imports ")))
}

/// Crates without cycles of imports. Their documentation has a map of the modules.
const ORDERED: [&str; 9] = [
    "slim",
    "slim-c",
    "slim-core",
    "slim-sys",
    "slim-stream",
    "slim-agent",
    "slim-rdma",
    "slim-verbs",
    "slim-preload",
];

#[test]
fn files_import_each_other_in_one_direction() {
    let cycles: Vec<_> = ORDERED.iter().filter_map(|krate| cycle_in(krate)).collect();
    assert!(cycles.is_empty(), "{cycles:#?}");
}

/// The same for top-level modules: a module counts as one with all its submodules.
#[test]
fn modules_import_each_other_in_one_direction() {
    for krate in [
        "slim",
        "slim-c",
        "slim-core",
        "slim-sys",
        "slim-stream",
        "slim-rdma",
        "slim-verbs",
        "slim-preload",
    ] {
        let top = |module: &Module| module.iter().take(1).cloned().collect::<Module>();
        let mut tops: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        for (module, imported) in imports_in(krate) {
            let others = imported
                .iter()
                .map(top)
                .filter(|t| !t.is_empty() && *t != top(&module));
            tops.entry(top(&module)).or_default().extend(others);
        }
        let way = cycle(&tops).map(|way| named(way, " imports "));
        assert_eq!(way, None, "{krate}");
    }
}

#[test]
fn no_more_than_three_files_import_each_other() {
    for krate in ["slim-lab", "slim-cli"] {
        for group in import_groups(&imports_in(krate)) {
            assert!(group.len() <= 3, "{krate}: {}", named(group, ", "));
        }
    }
}

/// The crates of the workspace that a crate depends on, without those that only its tests use.
fn uses(krate: &str) -> BTreeSet<String> {
    let manifest = fs::read_to_string(workspace(krate).join("Cargo.toml")).unwrap();
    let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
    let lines = dependencies.lines().take_while(|l| !l.starts_with('['));
    let names = lines.filter_map(|l| l.split(['.', ' ', '=']).next());
    let ours = names.filter(|name| *name == "slim" || name.starts_with("slim-"));
    ours.map(str::to_owned).collect()
}

#[test]
fn crates_use_each_other_as_the_map_says() {
    let text = fs::read_to_string(workspace("ARCHITECTURE.md")).unwrap();
    let rows = text
        .lines()
        .skip_while(|l| *l != "| crate | uses |")
        .skip(2);
    let mut mapped = 0;
    for row in rows.take_while(|l| l.starts_with('|')) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let names = cells[2].split(", ").filter(|name| !name.is_empty());
        let names: BTreeSet<_> = names.map(str::to_owned).collect();
        assert_eq!(names, uses(cells[1]), "{}", cells[1]);
        mapped += 1;
    }
    let dirs = fs::read_dir(workspace("")).unwrap().flatten();
    let is_ours = |name: &str| name == "slim" || name.starts_with("slim-");
    let crates = dirs.filter(|d| is_ours(&d.file_name().to_string_lossy()));
    assert_eq!(mapped, crates.count(), "crates in the map");
}

/// The map in a crate's documentation names all its modules.
#[test]
fn maps_of_modules_are_complete() {
    for krate in ORDERED {
        let text = fs::read_to_string(workspace(krate).join("src/lib.rs")).unwrap();
        let rows: String = text.lines().filter(|l| l.starts_with("//! | ")).collect();
        let file = syn::parse_file(&text).unwrap();
        let modules = file.items.iter().filter_map(|item| match item {
            Item::Mod(module) => Some(format!("`{}`", module.ident)),
            _ => None,
        });
        let missing: Vec<_> = modules.filter(|name| !rows.contains(name)).collect();
        assert!(missing.is_empty(), "{krate}: not in the map: {missing:?}");
    }
}

/// No module of slim-preload imports a module in a row above its own.
#[test]
fn the_map_of_slim_preload_goes_from_the_top_to_the_bottom() {
    let text = fs::read_to_string(workspace("slim-preload/src/lib.rs")).unwrap();
    let rows = text.lines().filter_map(|l| l.strip_prefix("//! | "));
    let row_of: BTreeMap<String, usize> = rows
        .enumerate()
        .flat_map(|(n, row)| {
            let names = row
                .split(" | ")
                .next()
                .unwrap()
                .split('`')
                .skip(1)
                .step_by(2);
            names
                .map(move |name| (name.to_owned(), n))
                .collect::<Vec<_>>()
        })
        .collect();
    for (module, imported) in imports_in("slim-preload") {
        let Some(own) = module.first() else { continue };
        for other in imported.iter().filter_map(|other| other.first()) {
            assert!(row_of[own] <= row_of[other], "{own} imports {other}");
        }
    }
}

#[test]
fn a_cycle_of_imports_is_found() {
    let file = |text: &str| syn::parse_file(text).unwrap();
    let name = |text: &str| vec![text.to_owned()];
    let mut files = BTreeMap::from([
        (Module::new(), file("mod a; mod b; mod c;")),
        (name("a"), file("use crate::{b::X, c};")),
        (name("b"), file("fn f() { super::c::g() }")),
        (name("c"), file("#[cfg(test)] mod tests { use crate::a; }")),
    ]);
    assert_eq!(cycle(&imports(&files)), None);
    files.insert(name("c"), file("fn g() -> crate::a::Y { todo!() }"));
    let found = cycle(&imports(&files)).expect("there is a cycle");
    assert_eq!(found.first(), found.last());
    let groups = import_groups(&imports(&files));
    let all = BTreeSet::from([name("a"), name("b"), name("c")]);
    assert_eq!(groups, BTreeSet::from([all]));
}
