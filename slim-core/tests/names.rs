//! A name belongs to one type in the workspace.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{Attribute, Item};

fn is_test(attributes: &[Attribute]) -> bool {
    let of_test = |a: &Attribute| {
        let mut found = false;
        let _ = a.parse_nested_meta(|meta| {
            found |= meta.path.is_ident("test") || meta.path.is_ident("loom");
            Ok(())
        });
        a.path().is_ident("cfg") && found
    };
    attributes.iter().any(of_test)
}

/// The types that `items` define, without those of tests.
fn types(items: &[Item], found: &mut Vec<String>) {
    for item in items {
        match item {
            Item::Enum(i) => found.push(i.ident.to_string()),
            Item::Mod(i) if !is_test(&i.attrs) => {
                types(i.content.as_ref().map_or(&[], |(_, items)| items), found);
            }
            Item::Struct(i) => found.push(i.ident.to_string()),
            Item::Trait(i) => found.push(i.ident.to_string()),
            Item::Type(i) => found.push(i.ident.to_string()),
            Item::Union(i) => found.push(i.ident.to_string()),
            _ => {}
        }
    }
}

/// The source files below `dir`, without those of tests.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if name == "tests" || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn a_name_belongs_to_one_type() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut all = Vec::new();
    for krate in fs::read_dir(&root).unwrap().flatten() {
        files(&krate.path().join("src"), &mut all);
    }
    assert!(all.len() > 200, "{} files", all.len());
    let mut where_defined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for path in all {
        let text = fs::read_to_string(&path).unwrap();
        let mut found = Vec::new();
        types(&syn::parse_file(&text).unwrap().items, &mut found);
        for name in found {
            let file = path.strip_prefix(&root).unwrap().display().to_string();
            where_defined.entry(name).or_default().push(file);
        }
    }
    where_defined.retain(|_, files| files.len() > 1);
    assert!(where_defined.is_empty(), "{where_defined:#?}");
}
